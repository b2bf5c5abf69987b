"""Between chats and tokens: templates, tokenizers, tools and reasoning."""
