"""Text to tokens and back: tokenizer, chat templates, infill, stop texts, JSON schemas, tools."""
