"""Training the drafter on the target's hidden states. Knows neither the scheduler nor the engine."""
