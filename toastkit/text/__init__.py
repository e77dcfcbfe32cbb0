"""Text and tokens: tokenizer, chat messages and template, streaming detokenizer, stop strings."""
