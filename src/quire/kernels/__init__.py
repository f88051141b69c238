"""One folder per operation: contract, reference and fast versions, and the cases that all versions are tested on."""
