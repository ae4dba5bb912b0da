"""What RL trainers need on top of the engine: policies as weights, and thin adapters to trainers' own shapes."""
