"""Run records: each run's own folder, what goes into it, and facts about code and machine."""
