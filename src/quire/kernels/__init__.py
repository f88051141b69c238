"""A folder or a module per operation: contract, reference, fast versions, and the cases that test all versions."""
