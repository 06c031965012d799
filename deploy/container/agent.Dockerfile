# Image of the agent, for boards that run only containers, or whose system is too old (Jetson Nano, Xavier).
# agent.yml has the devices and mounts that it needs.
# After `make deb`, in the root of the repository:
#   docker buildx build --platform linux/amd64,linux/arm64 -f deploy/container/agent.Dockerfile .
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG TARGETARCH
# PURPOSE: train or infer. INDEX: a package index; without one, neither PyTorch nor ONNX Runtime is installed.
ARG PURPOSE=train
ARG INDEX=""

COPY build/deb/fieldfleet-agent_*+py3_${TARGETARCH}.deb /tmp/
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends /tmp/fieldfleet-agent_*.deb \
    && rm -rf /tmp/*.deb /var/lib/apt/lists/*
RUN if [ -n "$INDEX" ]; then device-agent setup "$PURPOSE" --index "$INDEX"; fi

# The package's installation creates the user, so its number is not fixed.
# hadolint ignore=DL3066
USER fieldfleet
VOLUME ["/var/lib/fieldfleet"]
CMD ["device-agent", "run", "--config", "/etc/fieldfleet/agent.toml"]
