"""HTTP for all dialects: connections, request bodies, reply streams and access control."""
