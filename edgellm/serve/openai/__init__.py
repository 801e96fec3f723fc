"""OpenAI's API, which other dialects take messages, tools and options from."""
