"""Parts of the fault campaigns; `tools/crash_campaign.py` runs them."""
