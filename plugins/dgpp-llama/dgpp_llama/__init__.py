"""Llama-class models for dgpp."""
