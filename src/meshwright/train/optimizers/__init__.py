"""Update rules that torch does not have in the form that the contracts need."""
