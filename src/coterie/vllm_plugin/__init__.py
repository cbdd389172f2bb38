"""The part of coterie that runs inside vLLM: counts experts per KV block."""
