# Image of broker, enrolment service and edge server: one image, so that all three have the same users.
# After `make deb`, in the root of the repository:
#   docker buildx build --platform linux/amd64,linux/arm64 -f deploy/container/gateway.Dockerfile .
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG TARGETARCH
# Package index with PyTorch for the CPU. Without it, the image has no PyTorch, and the server cannot run.
ARG INDEX=""

COPY build/deb/fieldfleet-server_*+py3_${TARGETARCH}.deb /tmp/
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends mosquitto /tmp/fieldfleet-server_*.deb \
    && rm -rf /tmp/*.deb /var/lib/apt/lists/* \
    && install -d -o fieldfleet-server -g fieldfleet-server /etc/fieldfleet/site \
    && ln -s site/server.toml /etc/fieldfleet/server.toml \
    && ln -s /etc/fieldfleet/site/mosquitto.conf /etc/mosquitto/conf.d/fieldfleet.conf
RUN if [ -n "$INDEX" ]; then edge-server setup --index "$INDEX"; fi

# The package's installation creates the user, so its number is not fixed.
# hadolint ignore=DL3066
USER fieldfleet-server
VOLUME ["/etc/fieldfleet/site", "/var/lib/fieldfleet-server"]
CMD ["edge-server", "run", "--config", "/etc/fieldfleet/server.toml"]
