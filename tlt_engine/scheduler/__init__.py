"""Sequences, pages and what runs in the next step. Makes no device calls and knows no text."""
