"""From a record on disk to a prompt and its tokens: sources, resumable cursor, mixture, quarantine, renderer."""
