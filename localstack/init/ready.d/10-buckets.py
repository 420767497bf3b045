"""Hook that LocalStack runs when it is ready: make the buckets of TIER_BUCKETS (names with commas between).

Runs in LocalStack's own interpreter, with Docker and without.
"""

import os

import boto3

port = os.environ.get("TIER_S3_PORT", "4566")
s3 = boto3.client(
    "s3",
    endpoint_url=f"http://127.0.0.1:{port}",
    region_name="us-east-1",
    aws_access_key_id="test",
    aws_secret_access_key="test",
)
present = {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]}
wanted = os.environ.get("TIER_BUCKETS", "tier-cold").split(",")
for name in wanted:
    if name and name not in present:
        s3.create_bucket(Bucket=name)
