"""A loaded model and one answer of it: prefill, sampling, drafts, what chunks cost here."""
