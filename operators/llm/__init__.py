"""Models that stages ask: endpoints, clients, prompt templates, and what judges and synthesis share."""
