"""The run as a loop, and what one process does with it: build, train, evaluate, conclude, replay."""
