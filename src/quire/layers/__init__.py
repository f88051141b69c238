"""What at least three models share: linear, attention, rotary, norms, embedding and head."""
