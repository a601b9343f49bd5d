"""The OpenAI-compatible server: asyncio and HTTP outside, the engine's thread inside."""
