"""The routes of OpenAI's API."""
