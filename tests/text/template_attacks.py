"""A process that renders hostile templates: one line of JSON for each that it comes to the end of."""

import json
import resource

from quire.errors import ChatTemplateError
from quire.text.chat_template import ChatTemplate
from tests.processes import limit
from tests.text.template_cases import HOSTILE


def main(*names: str) -> None:
    """Render templates of `HOSTILE` by name."""
    ChatTemplate("{{ 1 }}").render([])
    start_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in names:
        limit(seconds=5)
        try:
            outcome = f"{len(ChatTemplate(HOSTILE[name]).render([]))} characters"
        except ChatTemplateError as error:
            outcome = f"refused: {error}"
        grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start_kib) / 1024
        print(json.dumps([name, [outcome, grown_mib]]), flush=True)
