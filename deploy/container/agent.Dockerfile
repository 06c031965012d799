# The agent of a board, for boards whose programs all come as images, or whose system is too old (Jetson Nano, Xavier).
# What it needs of the board is in agent.yml.
# After `make deb`, in the repository's root:
#   docker buildx build --platform linux/amd64,linux/arm64 -f deploy/container/agent.Dockerfile .
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG TARGETARCH
# What to bring, train or infer, and an index that pip could use; without an index neither comes.
ARG PURPOSE=train
ARG INDEX=""

COPY build/deb/fieldfleet-agent_*+py3_${TARGETARCH}.deb /tmp/
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends /tmp/fieldfleet-agent_*.deb \
    && rm -rf /tmp/*.deb /var/lib/apt/lists/*
RUN if [ -n "$INDEX" ]; then device-agent setup "$PURPOSE" --index "$INDEX"; fi

# Debian gives the user its number as the package is installed.
# hadolint ignore=DL3066
USER fieldfleet
VOLUME ["/var/lib/fieldfleet"]
CMD ["device-agent", "run", "--config", "/etc/fieldfleet/agent.toml"]
