"""Media of records: references, codecs that run in killable processes, and the store that serves looked-at parts and features."""
