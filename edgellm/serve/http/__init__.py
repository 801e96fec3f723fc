"""What all dialects need of HTTP: connections, bodies and streams, and who may ask."""
