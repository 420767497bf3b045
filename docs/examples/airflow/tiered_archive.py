"""A DAG for Airflow 3: archive what is sealed, merge small files, delete what was replaced. Each step may be run again.

Put it into the folder `dags`, and say where things are by environment variables of the process that runs the tasks:
TIER_URL, ARCHIVE_URL, and CATALOG (as https://catalog.example#lake) to publish in Iceberg.
"""

import datetime as dt

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

ARCHIVE = 'tiered archive "$TIER_URL" --to "$ARCHIVE_URL" --quiet --json'
PUBLISH = '${CATALOG:+--publish "iceberg:$CATALOG"}'

with DAG(
    "tiered_archive",
    schedule="17 * * * *",
    start_date=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    catchup=False,  # a run takes whatever there is: there is nothing to catch up
    max_active_runs=1,  # two would only do each other's work
    default_args={"retries": 3, "retry_delay": dt.timedelta(minutes=5)},
):
    archive = BashOperator(
        task_id="archive", bash_command=f"{ARCHIVE} --max-bytes 200GiB {PUBLISH}"
    )
    merge = BashOperator(task_id="merge", bash_command=f"{ARCHIVE} --merge {PUBLISH}")
    clean = BashOperator(task_id="clean", bash_command=f"{ARCHIVE} --clean --apply - {PUBLISH}")
    archive >> merge >> clean
