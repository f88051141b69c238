"""Prompts on which drafts are measured: a file to edit, a text to summarise, prose, and JSON by schema.

`benchmarks/drafts.py` and `speculation.py` use them. Must not know engines.
"""

from pathlib import Path
from typing import Any

import quire

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
