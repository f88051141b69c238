"""Off and drafts: the same requests through two engines by turns, one of which verifies drafts.

Four workloads, from one that repeats a given text to one that repeats nothing. Next to read: `quire/drafts/drafting.py`
for the choice of drafts.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quire
from quire.config import EngineOptions
from quire.engine.adapters import LoRARequest
from quire.engine.build import resolve_config
from quire.engine.llm_engine import LLMEngine
from quire.errors import ComparisonError, ConfigError, EngineError, MemoryCapacityError
from quire.events import EventKind
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.structured_outputs import StructuredOutputsParams
from quire.weights.checkpoint import open_checkpoint
from quire.weights.sources import resolve_source
from quire_lessons.compare.results import FAKE_MODEL, Chart, Comparison, Progress, RunSettings, Series
from quire_lessons.compare.rig import Size

# --- Requests that start at once on an engine, and the speed of their decoding --------------------


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """A request of `decode`."""

    prompt: Any
    params: SamplingParams
    adapter: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class Decodes:
    """The tokens of each request. Behind the first tokens: tokens, seconds and the number of the first event."""

    answers: list[list[int]]
    num_tokens: int
    seconds: float
    first_event: int


def load_engine(model: str, size: Size, **options: Any) -> LLMEngine:
    """Load an engine. `options`: of `EngineOptions`, beside those of the setting `size`.

    Raises: ConfigError, ModelError, CapacityError.
    """
    try:
        return LLMEngine.from_options(model, **options, **size.options(size.value))
    except MemoryCapacityError as error:
        checkpoint = open_checkpoint(resolve_source(model))
        raise size.refusal(
            error, lambda more: resolve_config(EngineOptions(model=model, **options, **more), checkpoint)
        ) from None


def decode(engine: LLMEngine, name: str, jobs: Sequence[DecodeJob]) -> Decodes:
    """Run requests to their end; time counts from the step that gives the last of them its first token on.

    Raises: EngineError for a request that failed.
    """
    for index, job in enumerate(jobs):
        engine.add_request(f"{name}-{index}", job.prompt, job.params, lora_request=job.adapter)
    answers: dict[str, list[int]] = {}
    seen, started, num_first = engine.events.num_recorded, 0.0, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            if output.outputs[0].finish_reason == "error":
                raise EngineError(f"{name}: {output.outputs[0].error}")
            answers[output.request_id] = list(output.outputs[0].token_ids)
        if not started and len(answers) == len(jobs):
            started, num_first = time.perf_counter(), sum(map(len, answers.values()))
            seen = engine.events.num_recorded
    seconds = time.perf_counter() - started
    ordered = [answers[f"{name}-{index}"] for index in range(len(jobs))]
    return Decodes(ordered, sum(map(len, ordered)) - num_first, seconds, seen)


# --- Prompts: a file to edit, a text to summarise, prose, and JSON to write -----------------------

WORKLOADS = {
    "edit": "a source file is written again, with another name for one word",
    "summary": "a text is summarised, with its sentences at hand",
    "prose": "a story at temperature 0.8, which repeats little",
    "JSON": "a record by a schema with long keys, most tokens of which its grammar forces",
}
"""Name → its description."""
EDIT_CHARACTERS, SUMMARY_CHARACTERS = 1500, 4000
"""Most of a source file that is edited, and of one that is summarised."""
TOPICS = ("a dragon", "the sea", "an old clock", "bread", "a lighthouse", "trains", "a garden", "chess")
RECORDS = """
hospital admission: patient_full_name:text patient_date_of_birth:text attending_physician_name:text \
has_health_insurance:flag number_of_previous_admissions:count reason_for_admission:text
customer order: customer_billing_address:text customer_shipping_address:text number_of_ordered_items:count \
total_price_in_euros:amount is_express_delivery_requested:flag preferred_payment_method:card,cash,transfer
flight booking: departure_airport_code:text destination_airport_code:text scheduled_departure_time:text \
passenger_passport_number:text number_of_checked_bags:count cabin_class_of_booking:economy,business,first
house for sale: street_address_of_property:text number_of_bedrooms:count number_of_bathrooms:count \
living_area_in_square_metres:amount year_of_construction:count has_private_garden:flag
scientific article: title_of_the_article:text names_of_all_authors:text year_of_publication:count \
journal_where_it_appeared:text number_of_citations:count is_freely_accessible:flag
weather report: name_of_weather_station:text temperature_in_celsius:amount relative_humidity_percent:count \
wind_speed_in_kilometres_per_hour:amount precipitation_in_millimetres:amount general_conditions:sunny,cloudy,rainy
used car: manufacturer_and_model:text year_of_first_registration:count mileage_in_kilometres:count \
type_of_fuel_required:petrol,diesel,electric number_of_previous_owners:count asking_price_in_euros:amount
job application: applicant_full_name:text applicant_email_address:text years_of_professional_experience:count \
highest_completed_education:text expected_annual_salary:amount is_available_immediately:flag
library loan: library_card_number:text title_of_borrowed_book:text author_of_borrowed_book:text \
date_of_the_loan:text number_of_renewals_so_far:count is_currently_overdue:flag
restaurant review: name_of_the_restaurant:text kind_of_cuisine_served:text rating_for_food_quality:count \
rating_for_friendly_service:count price_level_of_the_menu:low,middle,high would_recommend_to_friends:flag
insurance claim: insurance_policy_number:text date_of_the_incident:text description_of_the_damage:text \
estimated_repair_cost:amount was_anyone_injured:flag number_of_witnesses_present:count
software defect: short_summary_of_problem:text affected_component_name:text steps_to_reproduce_the_problem:text \
severity_of_the_problem:minor,major,critical number_of_affected_users:count is_regression_of_earlier_fix:flag
school report: full_name_of_student:text current_school_year:count grade_in_mathematics:count \
grade_in_natural_sciences:count days_of_unexcused_absence:count comment_of_class_teacher:text
concert ticket: name_of_performing_artist:text name_of_concert_venue:text date_and_time_of_concert:text \
seat_row_and_number:text price_of_the_ticket:amount is_transfer_to_others_allowed:flag
parcel tracking: tracking_number_of_parcel:text current_location_of_parcel:text weight_of_parcel_in_grams:count \
estimated_delivery_date:text status_of_the_delivery:sent,underway,delivered requires_signature_on_delivery:flag
bank transfer: sender_account_number:text recipient_account_number:text transferred_amount_in_euros:amount \
purpose_of_the_transfer:text is_recurring_every_month:flag requested_execution_date:text
sports match: name_of_home_team:text name_of_visiting_team:text goals_of_home_team:count \
goals_of_visiting_team:count number_of_spectators:count name_of_chief_referee:text
recipe: name_of_the_dish:text preparation_time_in_minutes:count number_of_servings:count \
list_of_main_ingredients:text is_suitable_for_vegetarians:flag level_of_difficulty:easy,medium,hard
power plant: official_name_of_plant:text primary_source_of_energy:coal,gas,wind,solar \
installed_capacity_in_megawatts:amount year_of_commissioning:count is_connected_to_national_grid:flag \
number_of_permanent_employees:count
museum exhibit: title_of_the_artwork:text full_name_of_artist:text year_of_completion:count \
materials_and_technique_used:text current_room_in_museum:text is_on_loan_from_elsewhere:flag
"""
"""Twenty records with long keys: a name, then keys with their types; words with commas are the values of an enum."""
_TYPES: dict[str, dict[str, Any]] = {
    "text": {"type": "string", "maxLength": 40},
    "count": {"type": "integer", "minimum": 0, "maximum": 100_000},
    "amount": {"type": "number", "minimum": 0, "maximum": 1_000_000},
    "flag": {"type": "boolean"},
}


def json_tasks() -> list[tuple[str, dict[str, Any]]]:
    """Return the questions for records, each with the schema of its answer."""
    tasks = []
    for line in RECORDS.strip().splitlines():
        name, _, rest = line.partition(": ")
        fields = dict(word.split(":") for word in rest.split())
        properties = {key: _TYPES.get(kind) or {"enum": kind.split(",")} for key, kind in fields.items()}
        schema = {"type": "object", "properties": properties, "required": [*fields], "additionalProperties": False}
        tasks.append((f"Invent the data of a {name}. Answer as JSON with the keys {', '.join(fields)}.", schema))
    return tasks


def prompt_of(workload: str, number: int) -> tuple[str, dict[str, Any] | None]:
    """Return a prompt of a workload, and the schema of its answer if it has one."""
    if workload == "JSON":
        tasks = json_tasks()
        asked, schema = tasks[number % len(tasks)]
        return asked + "\n", schema
    if workload == "prose":
        return f"A long story about {TOPICS[number % len(TOPICS)]}.\n\n", None
    sources = sorted(Path(quire.__file__).parent.glob("engine/*.py"))
    text = sources[number % len(sources)].read_text()
    if workload == "edit":
        text = text[:EDIT_CHARACTERS]
        return f"{text}\n\n# The same file, with another name:\n{text.replace('self', 'this')}\n\n{text[:80]}", None
    return f"{text[:SUMMARY_CHARACTERS]}\n\nThe most important sentences of this text are:\n", None


# --- The comparison -------------------------------------------------------------------------------

NUM_TOKENS = 96
MODES = {"off": "off", "drafts": "auto"}
"""Mode → its `speculative`."""
NUM_ROUNDS = 2
"""Each has prompts of its own, because drafts come from earlier answers too; every second one begins with drafts."""
MAX_POSITIONS = 8
"""Positions of a draft whose acceptance is shown."""
Request = tuple[str, SamplingParams]


@dataclass(slots=True)
class Record:
    """All turns of one mode: decoded tokens and their seconds, and the decode steps with the drafts of each.

    `drafts`: tokens verified and right, per draft.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    num_passes: int = 0
    drafts: list[tuple[int, int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds

    def acceptance(self) -> list[float]:
        """Return by position the share of right tokens among those verified behind right ones."""
        shares = []
        for at in range(MAX_POSITIONS):
            reached = [right for verified, right in self.drafts if verified > at and right >= at]
            if not reached:
                break
            shares.append(sum(right > at for right in reached) / len(reached))
        return shares


def compare(settings: RunSettings, progress: Progress) -> Comparison:
    """Run each workload in both modes by turns.

    Raises: ConfigError, ModelError, CapacityError; ComparisonError if outputs differ.
    """
    model, num_streams = settings.model or "smollm2", settings.requests or 1
    if model == FAKE_MODEL:
        raise ConfigError("compare speculation measures what a model repeats: model='fake' repeats nothing")
    num_tokens = settings.output_lens[0] if settings.output_lens else NUM_TOKENS
    if num_tokens < 2:
        raise ConfigError(
            f"output_lens={num_tokens}: compare speculation counts tokens behind the first: 2 or more fit"
        )
    engines = load_engines(model, settings, progress)
    try:
        if engines["drafts"].config.speculative == "off":
            raise ConfigError(f"compare speculation: drafts are off for {model}: `quire explain {model}` says why")
        found = {name: measure(engines, name, settings, num_tokens, progress) for name in WORKLOADS}
    finally:
        for engine in engines.values():
            engine.shutdown()
    shown = {"model": model, "seed": settings.seed, "requests": num_streams, "tokens": num_tokens}
    return _result(found, shown)


def load_engines(model: str, settings: RunSettings, progress: Progress, **options: Any) -> dict[str, LLMEngine]:
    """Load an engine per mode. `options`: of `EngineOptions`. Raises: ConfigError, ModelError, CapacityError."""
    progress(f"loading {model}", 0, 1)
    size = Size("requests", settings.requests or 1, lambda number: {"max_num_seqs": number})
    return {
        mode: load_engine(
            model,
            size,
            max_model_len=settings.context or 2048,
            seed=settings.seed,
            enable_prefix_caching=False,
            batch_invariant=True,
            speculative=value,
            **options,
        )
        for mode, value in MODES.items()
    }


def measure(
    engines: Mapping[str, LLMEngine], workload: str, settings: RunSettings, num_tokens: int, progress: Progress
) -> dict[str, Record]:
    """Run a workload in both modes by turns. Raises: ComparisonError if outputs differ; EngineError."""
    records, num_streams = {mode: Record() for mode in MODES}, settings.requests or 1
    for index in range(NUM_ROUNDS):
        progress(workload, index, NUM_ROUNDS)
        numbers = range(index * num_streams, (index + 1) * num_streams)
        requests = [_request(workload, number, num_tokens, settings.seed) for number in numbers]
        for mode in reversed(MODES) if index % 2 else MODES:
            _run(engines[mode], requests, f"{workload}-{index}", records[mode])
    if records["off"].answers != records["drafts"].answers:
        raise ComparisonError(f"{workload}: the outputs with drafts and without differ")
    return records


def _request(name: str, number: int, num_tokens: int, seed: int) -> Request:
    text, schema = prompt_of(name, number)
    params: dict[str, Any] = {"temperature": 0, "max_tokens": num_tokens}
    if name == "prose":
        params |= {"temperature": 0.8, "seed": seed + number}
    constraint = None if schema is None else StructuredOutputsParams(json=schema)
    return text, SamplingParams(ignore_eos=schema is None, structured_outputs=constraint, **params)


def _run(engine: LLMEngine, requests: Sequence[Request], name: str, record: Record) -> None:
    """Run requests to their end. Mutates: record. Raises: EngineError."""
    found = decode(engine, name, [DecodeJob(text, params) for text, params in requests])
    record.seconds += found.seconds
    record.num_tokens += found.num_tokens
    record.answers += found.answers
    for event in engine.events.since(found.first_event):
        if event.kind is EventKind.STEP:
            record.num_passes += event.data["num_iterations"]
            record.drafts += event.data["drafts"]


def _result(found: Mapping[str, Mapping[str, Record]], shown: dict[str, Any]) -> Comparison:
    rows: list[tuple[Any, ...]] = []
    explanation, series = [], []
    for name, records in found.items():
        off, on = records["off"], records["drafts"]
        num_verified, num_right = (sum(draft[at] for draft in on.drafts) for at in (0, 1))
        share = num_right / num_verified if num_verified else None
        rows.append((name, off.rate, on.rate, on.rate / off.rate, on.num_tokens / on.num_passes, num_verified, share))
        shares = on.acceptance()
        series.append(Series(name, tuple((float(at), each) for at, each in enumerate(shares, 1))))
        shares_text = ", ".join(f"{each:.0%}" for each in shares) or "no draft was verified"
        explanation.append(f"{name}: {WORKLOADS[name]}. Right by position in the draft: {shares_text}.")
    columns = (
        ("workload", "text"),
        ("off, tokens/s", "number"),
        ("drafts, tokens/s", "number"),
        ("gain", "times"),
        ("tokens per pass", "number"),
        ("verified", ""),
        ("right", "share"),
    )
    chart = Chart("right tokens by position in the draft", "position", "share", "line", tuple(series))
    num_streams = shown["requests"]
    title = f"{num_streams} at a time, up to {shown['tokens']} tokens each, {NUM_ROUNDS} turns with drafts and without"
    num_equal = num_streams * NUM_ROUNDS * len(found)
    return Comparison("speculation", title, shown, columns, tuple(rows), tuple(explanation), (chart,), num_equal)
