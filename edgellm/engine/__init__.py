"""The engine: a loaded model, its scheduler, its answers, sampling, drafts and costs of chunks."""
