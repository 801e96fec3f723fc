"""Speed, quality and limits of a loaded model; whether it computes what it should."""
