"""A model's plan on a GPU: calls on static memory, which a graph captures."""
