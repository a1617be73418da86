"""Which kernel each attention launch of a configuration reaches, before a server starts. Imports no torch."""
