"""The HTTP API of OpenAI; other dialects share its messages, tools and options."""
