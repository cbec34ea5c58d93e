import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { Bar, type IStatusProps, Section } from './parts';
import type { IBarRow } from './tokens';

/** A bar for each resource: what I hold of all that I could have, in my resource group, and overall if that differs. */
export function Resources({ status, context }: IStatusProps): JSX.Element | null {
  const { bars } = status;
  const { trans } = context;
  if (bars === null) {
    return null;
  }
  // With one resource group both bars would say the same.
  const several = bars.rows.some(
    row => row.mine !== row.mine_overall || row.total !== row.total_overall
  );
  return (
    <Section title={trans.__('Your use')}>
      {bars.rows.map(row => {
        const name = resourceName(row, trans);
        const here = ofText(row, row.mine, row.total, trans);
        const overall = ofText(row, row.mine_overall, row.total_overall, trans);
        return (
          <div key={row.kind} className="jp-fgpu-Resource">
            <div className="jp-fgpu-ResourceName">{name}</div>
            <div className="jp-fgpu-Minor">
              {several ? trans.__('In group %1: %2', bars.group, here) : here}
            </div>
            <Bar
              label={several ? trans.__('%1 in group %2', name, bars.group) : name}
              text={here}
              percent={row.percent}
            />
            {several && (
              <>
                <div className="jp-fgpu-Minor">
                  {trans.__('Overall: %1', overall)}
                </div>
                <Bar
                  label={trans.__('%1 overall', name)}
                  text={overall}
                  percent={row.percent_overall}
                />
              </>
            )}
          </div>
        );
      })}
    </Section>
  );
}

function resourceName(row: IBarRow, trans: TranslationBundle): string {
  switch (row.kind) {
    case 'fgpu':
      return trans.__('GPU');
    case 'cpu':
      return trans.__('CPU');
    case 'memory_mib':
      return trans.__('Memory');
  }
}

/** Return MiB as GiB, as the sessions page does: exactly, or to a tenth. */
function gib(mib: string): string {
  const exact = Number(mib) / 1024;
  return String(Number(mib) % 128 === 0 ? exact : Math.round(10 * exact) / 10);
}

function ofText(
  row: IBarRow,
  part: string,
  whole: string,
  trans: TranslationBundle
): string {
  switch (row.kind) {
    case 'fgpu':
      return trans.__('%1 of %2 fGPU', part, whole);
    case 'cpu':
      return trans.__('%1 of %2 cores', part, whole);
    case 'memory_mib':
      return trans.__('%1 of %2 GiB', gib(part), gib(whole));
  }
}
