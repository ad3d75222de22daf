"""Between text and token ids: tokeniser, chat template, incremental detokeniser, stop strings."""
