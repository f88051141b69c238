"""One folder per operation: contract, reference and fast versions, and the cases that tests and benchmarks share."""
