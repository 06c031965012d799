"""Protocol of trained models: releases, rollouts, collaborative inference."""
