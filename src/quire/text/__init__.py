"""Between text and tokens: tokenizers, chat templates, incremental detokeniser, stop strings."""
