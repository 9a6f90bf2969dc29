"""Chat formats: tokenizer, renderers (messages to ids), streaming parsers (ids to events), transcripts."""
