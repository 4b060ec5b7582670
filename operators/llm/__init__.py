"""Models that stages ask: endpoints, clients, prompt templates, and the common parts of judges and synthesis."""
