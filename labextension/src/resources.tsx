import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { Bar, type IContext, Section } from './parts';
import type { IBarRow, IStatus } from './tokens';

/** Two bars for each resource: mine in my resource group, and mine overall, of that and what I could still get. */
export function Resources(props: {
  status: IStatus;
  context: IContext;
}): JSX.Element | null {
  const { bars } = props.status;
  const { trans } = props.context;
  if (bars === null) {
    return null;
  }
  return (
    <Section title={trans.__('Your share of what you can use')}>
      {bars.rows.map(row => {
        const name = resourceName(row, trans);
        const here = ofText(row, row.mine, row.total, trans);
        const overall = ofText(row, row.mine_overall, row.total_overall, trans);
        return (
          <div key={row.kind} className="jp-fgpu-Resource">
            <div className="jp-fgpu-ResourceName">{name}</div>
            <div className="jp-fgpu-Minor">
              {trans.__('In group %1: %2', bars.group, here)}
            </div>
            <Bar
              label={trans.__('%1 in group %2', name, bars.group)}
              text={here}
              percent={row.percent}
            />
            <div className="jp-fgpu-Minor">{trans.__('Overall: %1', overall)}</div>
            <Bar
              label={trans.__('%1 overall', name)}
              text={overall}
              percent={row.percent_overall}
            />
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
      return trans.__('%1 of %2 MiB', part, whole);
  }
}
