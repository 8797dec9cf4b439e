"""DeepSeek-V4.1-Flash."""
