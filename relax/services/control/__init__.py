"""Control of a run under way over HTTP: what may be asked, operations, the application and its server, the client."""
