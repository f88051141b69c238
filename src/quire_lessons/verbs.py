"""The verbs of this package, which the command line lists without importing them. Next to read: `cli/tour.py`."""

VERBS = {
    "tour": ("See inside", "quire_lessons.cli.tour", "Follow one prompt through the engine, step by step."),
    "compare": ("See inside", "quire_lessons.cli.compare", "Compare ways to cache, batch and allocate on one engine."),
    "learn": ("Learn", "quire_lessons.cli.learn", "List the exercises of the lessons."),
    "learn show": ("Learn", "quire_lessons.cli.learn", "Print the task of an exercise."),
    "learn check": ("Learn", "quire_lessons.cli.learn", "Check an answer or a program on the engine."),
}
"""Section, module and line of the top-level help of each: `quire/cli/main.py`."""
