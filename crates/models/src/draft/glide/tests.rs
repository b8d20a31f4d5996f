// Filled below: every trained tensor gets a gradient; files round-trip.
