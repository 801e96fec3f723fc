"""Text to tokens and back: tokenizer, templates, infill, stop texts, JSON schemas."""
