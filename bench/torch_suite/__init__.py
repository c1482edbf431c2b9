"""PyTorch's own distributed test suite, from the torch wheel, against Gloo and against the backend
"paceline"."""
