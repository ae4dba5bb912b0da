"""The target model: configuration, weights, forward pass and loading. Knows neither requests nor sampling."""
