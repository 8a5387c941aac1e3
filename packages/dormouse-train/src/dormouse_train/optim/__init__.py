"""Which parameter is updated how (groups), how it is updated (optimizer), and how fast (schedule)."""
