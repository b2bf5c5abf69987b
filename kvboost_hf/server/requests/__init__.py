"""The bodies of requests: their fields, what each may hold, and how those of other APIs are read as OpenAI's."""
