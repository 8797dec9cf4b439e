"""Replies held to a grammar: schemas checked, grammars compiled, tokens masked."""
