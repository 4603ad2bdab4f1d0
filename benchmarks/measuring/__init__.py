"""How fast and how repeatable measuring is, beside what one would write without autoshard."""
