"""The latent expert pass in Triton: every expert's weights streamed once each way, nothing expanded kept."""
